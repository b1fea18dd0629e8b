"""Engines that sample: the protocol that each meets, vLLM and transformers."""
