"""The store's folders and files: the only code that writes to the store."""
