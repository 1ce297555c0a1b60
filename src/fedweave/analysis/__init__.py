"""The paper's theory measured on a run (``fedweave diagnose``), and what training costs (``fedweave budget``)."""
