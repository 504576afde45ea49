"""Parameter servers on Ray, and an advertisement model to train with them."""
