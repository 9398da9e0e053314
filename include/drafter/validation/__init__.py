"""What phase validate is made of: what a row is, told from its ids, and what becomes of it."""
