"""SGLang servers as rollout engines: started here or by somebody else, spoken to over HTTP."""
