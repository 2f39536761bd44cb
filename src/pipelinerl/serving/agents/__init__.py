"""Trains existing agents unchanged: programs that only need the address of the API of OpenAI or Anthropic.

    the agent's code ──HTTP──▶ gateway ──calls──▶ session ──Conversation──▶ the rollout's client ──▶ any engine
    (a thread each)        (one thread)           (the generation loop)

Each rollout has its own address, which identifies its calls however the agent is implemented. Calls become turns with exact
token ids, log-probs and versions, as in any other environment. Needs the extra `serve`.
"""
