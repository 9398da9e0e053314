"""What phase train is made of: from the rows of all datasets to the weights of a drafter."""
