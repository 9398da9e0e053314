"""How good a drafter is: on prompts that it never saw, by replay and by an engine's counters."""
