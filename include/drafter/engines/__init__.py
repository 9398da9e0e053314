"""The engine that writes responses: its client, and an embedded server for where there is none."""
