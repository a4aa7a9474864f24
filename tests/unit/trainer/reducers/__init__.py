"""Reducers of dense gradients, over ranks in threads of this process."""
