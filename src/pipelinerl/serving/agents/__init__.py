"""Training agents as they are: programs that know nothing of training but the address of an OpenAI-compatible API.

    the agent's code ──HTTP──▶ gateway ──calls──▶ session ──Conversation──▶ the rollout's client ──▶ any engine
    (a thread each)        (a thread of its own)  (the loop that generates)

Each rollout has an address of its own, so its calls are known by it, whatever the agent is made of. They become turns of
exact token ids, log-probabilities and versions, as those of any other environment. Needs the extra `serve`.
"""
