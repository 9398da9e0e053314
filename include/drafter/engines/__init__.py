"""Servers of the target model that the project brings itself."""
