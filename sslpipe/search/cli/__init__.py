"""The commands: search and browse, gallery, choose."""
