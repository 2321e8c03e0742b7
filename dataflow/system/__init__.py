"""What the operating system offers: clock, processes, signals; and masking of secrets."""
