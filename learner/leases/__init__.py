"""The life of every lease: what is granted, kept, trained on or dropped. No torch, thread, socket or clock."""
