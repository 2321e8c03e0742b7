"""The samples of a run, to be read: their files, selection, and how they are shown."""
