"""Language models: texts, GPT-2 and recipes."""
