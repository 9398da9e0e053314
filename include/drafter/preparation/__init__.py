"""What phase prepare is made of: rows of every source to prompts, and why others are none."""
