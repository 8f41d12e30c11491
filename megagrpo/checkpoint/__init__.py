"""What is saved so that a killed run continues with the same numbers, and when may an old save go?"""
