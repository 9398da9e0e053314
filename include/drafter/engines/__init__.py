"""Ways to run the target model: an embedded server, and what extraction runs it with."""
