"""How much attention every key gets."""
