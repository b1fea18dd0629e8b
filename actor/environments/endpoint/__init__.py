"""An endpoint for each episode: agents that know only OpenAI's or Anthropic's API play it over HTTP."""
