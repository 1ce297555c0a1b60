"""The paper's theory, measured on a run (``fedweave diagnose``), and what a federation costs (``fedweave budget``)."""
