"""The course of a run: the stages of each step, their schedule, evaluations, saves, stops."""
