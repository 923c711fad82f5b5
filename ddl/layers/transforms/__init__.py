"""Transforms of training inputs, which draw by position: of images, of pairs, of tokens."""
