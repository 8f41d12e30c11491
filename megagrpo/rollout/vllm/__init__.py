"""vLLM servers as rollout engines: started here, in an environment of their own, asked over HTTP."""
