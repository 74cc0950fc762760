"""Prompts that are for none of the experts of the starter pack."""

UNRELATED = (
    "What is the capital of France?",
    "Tell me a joke",
    "Write a poem about rain",
    "Who wrote Hamlet?",
    "How do I bake bread?",
    "Explain photosynthesis in simple words",
    "What is the weather like today?",
    "Translate good morning into Spanish",
    "Write a short story about a dragon",
    "Summarise the plot of Moby Dick",
    "Write a function that reverses a string in Python",
    "Give me a recipe for pancakes",
    "What is 12 times 7?",
    "Why is the sky blue?",
    "Hello, how are you?",
    "Write an email to my boss asking for leave",
)
