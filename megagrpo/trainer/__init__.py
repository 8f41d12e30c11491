"""What happens in a run, in what order? Each step's stages, their schedule, evaluations, saves, stops."""
