"""The Trainer, the training loop on the devices, evaluation, and checks before training."""
