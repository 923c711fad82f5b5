"""The command `ddl lr_finder`, which makes a learning rate range test."""
