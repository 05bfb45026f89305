"""Looks at programs: traces, predicts, measures, and says what keeps them from their limit."""
