"""SGLang servers as rollout engines: started here or external, asked over HTTP."""
