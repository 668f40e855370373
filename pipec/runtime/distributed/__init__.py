"""One plan over many processes: every rank runs its own device's list, values travel point to point."""
