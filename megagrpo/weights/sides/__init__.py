"""Where does one side keep each tensor? A manifest for Megatron's ranks, Transformers or a checkpoint."""
