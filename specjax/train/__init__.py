"""Training drafters: from prompts to the target's own responses, from these to a drafter folder."""
