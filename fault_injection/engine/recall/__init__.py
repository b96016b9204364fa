"""The recall model: a tiny Llama that recites what stands in its context, so that a leak can be read."""
