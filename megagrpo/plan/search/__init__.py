"""Which layouts are fastest on so many GPUs?"""
