"""What a config can name, where its values come from, and how two configs differ."""
