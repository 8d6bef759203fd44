"""What the paper trained, as frozen dataclasses: the settings it gives, and those it leaves open, documented as ours.

Standard library only, so that a command line can offer every field without loading torch.
"""
