"""Running a plan: the only part of pipec that touches real tensors."""
