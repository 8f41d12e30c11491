"""What is installed, what works, and what is missing on this machine?"""
