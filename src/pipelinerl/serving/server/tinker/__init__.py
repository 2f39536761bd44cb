"""A server of the Tinker API: clients train LoRA adapters with the SDK `tinker`, and sample from them.

    SDK ──▶ routes ──▶ learner's thread   forward_backward, optim_step, save, load: in the order of arrival
              │           (learner)         │ adapters
              └─────▶ sampler ──▶ engine ◀──┘ the adapter whose turn it is, which the engine merges

`wire` has the messages, `losses` the definitions of the losses. Needs the extra `tinker`; the SDK is only the client's.
"""
