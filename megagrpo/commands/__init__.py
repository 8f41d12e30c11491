"""The commands of `megagrpo`, one file per question: what each reads, the function that it calls, what it prints."""
