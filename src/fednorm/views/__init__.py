"""What people look at: descriptions, previews, pictures, the demo, exports."""
