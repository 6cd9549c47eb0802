"""Where Ray comes from: a local one that we start, or one that is joined."""
