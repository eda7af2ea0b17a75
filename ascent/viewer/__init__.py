"""Run folders as a person looks at them: read only, of any size, while they are being written, from any machine."""
