"""What cannot run, and what is unwise?"""
