"""The HTTP dialects in which agents ask: pure functions from a request's JSON to a ChatRequest, and from a ChatAnswer
to JSON or to the events of a stream."""
