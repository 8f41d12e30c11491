"""The examination of this machine: packages and devices that are installed, work, or are missing."""
