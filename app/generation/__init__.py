"""From a request to prompt token ids, and from tokens to events with text.

Main names: GenerationRequest, PromptEncoder, Completion, OutputChoice.
Invariants: The concatenated deltas are the text, in whole characters; a stop string never reaches the client in part.
"""
