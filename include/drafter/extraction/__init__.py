"""Hidden states: which rows make a shard, what is checked before one is written, what it holds."""
