"""What `ContextParallelTrainer` is made of: losses of a rank's part (`losses.py`), noise of embeddings (`noise.py`),
what is refused (`refusals.py`), and TRL's trainers: which there are (`kinds.py`), ranks of one sequence as one process
(`accelerators.py`, `counts.py`), models that score tokens over ranks (`token_scores.py`), completions that all ranks
share (`policies.py`), distillation (`distillation.py`)."""
