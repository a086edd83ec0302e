"""Who conducts: text and an image in, a video out."""
