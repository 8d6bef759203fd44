"""Callbacks and registrations for the frameworks that people train in. Each module is imported only when used:

- `mvngrad.integrations.transformers`: `MonitorCallback` for the Hugging Face Trainer
- `mvngrad.integrations.lightning`: `MonitorCallback` for Lightning
- `mvngrad.integrations.timm`: `register()`, which adds the optimizers to timm's registry
"""
