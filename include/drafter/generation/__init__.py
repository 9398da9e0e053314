"""What phase generate is made of, and what a person may do to its answers before it goes on."""
