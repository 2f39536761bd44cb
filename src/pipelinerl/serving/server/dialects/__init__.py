"""Other APIs for chats: OpenAI's Responses (`responses`) and Anthropic's Messages (`messages`).

    request ──read──▶ ChatBody ──▶ the one path of generation ──▶ choices and chunks of Chat Completions ──writer──▶ answer

A request is translated into a request of Chat Completions, and its answer back. What can't be translated is refused by name.
"""
